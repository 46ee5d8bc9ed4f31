//go:build !linux

package netstack

import (
	"io"
	"net"
)

func calm(conn net.Conn) io.ReadWriteCloser { return conn }
