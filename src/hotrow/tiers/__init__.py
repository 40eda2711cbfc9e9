"""Where rows sit. Siblings behind one small protocol; they never import each other."""
