"""The thin core of Gaudi Recipes. Nothing is re-exported: a reader sees the file each name comes from."""
