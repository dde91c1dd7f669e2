"""Stragglers: ranks that slow the job; they are timed, scored and reported."""
