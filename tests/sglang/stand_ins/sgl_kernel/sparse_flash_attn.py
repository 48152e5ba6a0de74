"""Import-only: SGLang's tests of attention backends import them all."""

from sgl_kernel import __getattr__ as __getattr__
