// Command anchor keeps a VM without life in KVM until it is killed, for the machine
// of package l1: while there is one, KVM does not rewrite the kernel's code at the
// first VM and after the last.
//
// It prints one line: "held", or what went wrong.
package main
