"""How fast a model decodes and reads prompts, and what memory it takes: timing alone, no files and no loading."""
