package imagestore_test

func pullHelper() int { return 1 }
