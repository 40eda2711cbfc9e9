namespace hotrow {}
