"""Plain-torch versions of what linear-attention models compute with GPU-only kernels.

They are the CPU backend of the stock models, and the oracle that tests compare with. Nothing here
is needed to use an exported checkpoint.
"""
