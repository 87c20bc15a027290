"""``python -m granikv_sglang.calibrate``: measures the classifier's constants on the present device."""
