package controller

import "time"

// Note puts a change of an application that is not the controller's own into the events: somebody reset its Router. Safe for
// concurrent use.
func (c *Controller) Note(app, what, reason string) {
	c.ring.add(Event{At: time.Now(), App: app, To: what, Reason: reason})
	c.ring.wake()
}
