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
netprobe flood HOST:PORT N    so many connections at once, each with an echo of its own
netprobe rtt HOST:PORT N      so many round trips of one byte
netprobe get HOST:PORT BYTES  ask a test server for so much
netprobe put HOST:PORT BYTES  give a test server so much
netprobe echo PORT N          serve so many connections on a port, one after the other
`

var errUsage = errors.New("wrong usage")

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "netprobe:", err)
		if errors.Is(err, errUsage) {
			fmt.Fprint(os.Stderr, usage)
		}
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) < 2 {
		return errUsage
	}
	if args[0] == "escape" {
		return json.NewEncoder(out).Encode(escape(args[1:]))
	}
	if len(args) != 3 {
		return errUsage
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
		err = errUsage
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(result)
}
