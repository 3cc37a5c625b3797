"""Laws, their fit, budgets and the optimum. Pure: frames and arrays in, frozen results out; never torch or ray."""
