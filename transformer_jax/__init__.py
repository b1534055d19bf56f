"""The encoder-decoder Transformer of 'Attention Is All You Need' in JAX.

`__init__.pyi` lists the public interface. Importing the package imports nothing else: a name is looked up when it is
first used, so that the command line starts fast and jax can be configured before it.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
