// Command netprobe is what tests and the benchmark run in a guest to look at its
// network from inside: as a plain client, or as somebody who wants out. It prints
// JSON. It is for Linux, and static, so that it runs on every image.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
)

const usage = `netprobe escape HOST:PORT...  every way out that a guest may try; the addresses are those of a server on the host
netprobe flood HOST:PORT N    N connections at once, each with an echo of its own
netprobe rtt HOST:PORT N      N round trips of one byte
netprobe get HOST:PORT BYTES  ask a test server for so much
netprobe put HOST:PORT BYTES  give a test server so much
netprobe echo PORT N          serve N connections on a port, one after the other
`

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "netprobe:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) < 2 {
		return errors.New("usage:\n" + usage)
	}
	if args[0] == "escape" {
		return json.NewEncoder(out).Encode(escape(args[1:]))
	}
	if len(args) != 3 {
		return errors.New("usage:\n" + usage)
	}
	n, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return err
	}
	var result any
	switch args[0] {
	case "flood":
		result, err = flood(args[1], int(n))
	case "rtt":
		result, err = roundTrips(args[1], int(n))
	case "get":
		result, err = get(args[1], n)
	case "put":
		result, err = put(args[1], n)
	case "echo":
		return echo(args[1], int(n), out)
	default:
		err = errors.New("usage:\n" + usage)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(result)
}
