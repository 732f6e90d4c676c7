"""Engines: things that hold a policy (see `kernelwright.types.Engine`). Each is imported only when it is named."""
