"""What clients depend on, point by point: each test is named after the point that it proves."""
