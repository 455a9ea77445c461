"""What the loss of a model is sensitive to: passes forward and backward through it."""
