"""Reports as text in a terminal: `report` begins with the answer, `details` has the evidence behind it."""
