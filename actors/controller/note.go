package controller

import "time"

// Note adds a change of an application that another component made to the events, for example a reset of its
// Router. Safe for concurrent use.
func (c *Controller) Note(app, what, reason string) {
	c.ring.add(Event{At: time.Now(), App: app, To: what, Reason: reason})
	c.ring.wake()
}
