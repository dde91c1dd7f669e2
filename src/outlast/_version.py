"""The version of outlast, for modules that must not import the package's root."""

from __future__ import annotations

VERSION = "0.1.0"
