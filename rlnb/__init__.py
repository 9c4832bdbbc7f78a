"""A Jupyter-centred research suite for reinforcement learning that people can trust."""
__version__ = "0.1.0"
