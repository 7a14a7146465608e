"""Rehearses programs written for Intel Gaudi on a machine without one. See `hpu_simulator/README.md`."""
