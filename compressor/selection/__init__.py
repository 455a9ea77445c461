"""Which key/query channels of each head to keep: one file per selector, pure tensor mathematics."""
