// Command netprobe is what tests and the benchmark run in a guest to look at its
// network from inside: as a plain client, or as somebody who wants out. It prints
// JSON. It is for Linux, and static, so that it runs on every image.
package main
