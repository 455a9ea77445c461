"""Retrieval and aggregation prompts, made offline in RULER's published forms (Hsieh et al. 2024, arXiv 2404.06654)."""
