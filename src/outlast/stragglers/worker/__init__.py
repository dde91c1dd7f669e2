"""What a rank measures of its steps: sections, samples of the main thread, windows."""
