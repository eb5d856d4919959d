"""What all formats with torch's pickles share: storages, tensors, the walk to a tree; no format itself."""
