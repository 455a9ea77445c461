"""What the recurrent state uses of itself, and whether the model needs it."""
