package iii

import "context"

// Connected waits until the client has a connection, which may be lost again the
// moment it returns. It fails with ErrClosed or ctx's error.
func (c *Client) Connected(ctx context.Context) error {
	for {
		c.mu.Lock()
		connected, changed := c.current != nil, c.changed
		c.mu.Unlock()
		if connected {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-c.done:
			return ErrClosed
		}
	}
}
