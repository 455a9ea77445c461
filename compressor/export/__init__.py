"""Writing the output folder: weights, companion files, the model card; staged beside it and renamed at the end."""
