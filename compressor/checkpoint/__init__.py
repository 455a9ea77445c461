"""A model as files: where it is, what its config and weight headers say, and why it would be refused.

Everything here is known before a model is built, and nothing here holds more than one tensor.
"""
