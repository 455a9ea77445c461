"""Progressive Fisher selection: channels removed in stages, by what the masked model's outputs say they are worth."""
