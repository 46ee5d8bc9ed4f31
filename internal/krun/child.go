//go:build cgo && (linux || darwin)

package krun

// #cgo CFLAGS: -Wall -Wextra
// #cgo LDFLAGS: -ldl
import "C"
