"""The demonstration model's files, and in `training` how they are made."""
