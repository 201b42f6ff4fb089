"""Processes beside the trainers that hold the model's weights and draw samples from it."""
