"""How words are answered."""
