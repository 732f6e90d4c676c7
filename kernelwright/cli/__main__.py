"""`python -m kernelwright.cli`, for checkouts that are not installed."""

from kernelwright.cli import main

main()
