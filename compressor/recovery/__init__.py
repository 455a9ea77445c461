"""Recovery training: what pruning cost in quality is learnt back from the unpruned model."""
