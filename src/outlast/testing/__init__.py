"""What tests of training scripts need: transcripts and doubles of ports."""
