"""The ops, a room each: the public function, its checks, its fake and its reference.

A room has the same name here, in csrc/cpu, in csrc/cuda and in tests; `csrc/ops.cpp` lists the
schemas. The references of `linear` fill a file of their own, linear_reference.py. The functions are
exported by `torch_turboquant`, so that no function hides its module.
"""
