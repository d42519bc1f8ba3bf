"""What is built on attention."""
