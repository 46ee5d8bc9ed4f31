//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "netprobe runs in guests, which are Linux")
	os.Exit(2)
}
