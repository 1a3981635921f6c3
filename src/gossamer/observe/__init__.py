"""Listen to what happens in a run: live progress, the record at the end, and pictures of it."""
