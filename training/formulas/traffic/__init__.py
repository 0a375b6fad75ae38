"""Traffic of single modules and layers, by the formulas of the papers that they are from."""
