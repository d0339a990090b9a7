"""The bench and the microscope's output: verification, measurement and the report."""
