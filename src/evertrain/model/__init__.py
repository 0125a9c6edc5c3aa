"""The words of the product: frozen data that crosses boundaries, and the exception tree. No I/O."""
