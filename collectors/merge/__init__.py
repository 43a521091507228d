"""From the records of all ranks to one trace: who is where, whose clock says what, which record is which op."""
