"""What a model has around its attention."""
