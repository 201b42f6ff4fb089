"""What is run: the sizes of a model, its products, and the activations that it keeps."""
