"""The operations a forward needs: one interface (`interface.py`), a NumPy and a CUDA implementation."""
