//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Println("anchor: KVM is Linux's alone")
	os.Exit(1)
}
