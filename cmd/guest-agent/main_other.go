//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "guest-agent runs in Linux guests only: build it with GOOS=linux")
	os.Exit(2)
}
