// Package vm boots one VM and watches it: Launcher admits and launches, Machine
// is the result, Driver is what starts the process behind it.
package vm
