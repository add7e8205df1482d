package main

import (
	"github.com/spf13/cobra"
)

func newValidate(e *env) *cobra.Command {
	var show bool
	cmd := &cobra.Command{
		Use:   "validate FILE [flags]",
		Short: "check an app.yaml, offline",
		Long: `validate reads a file as deploy does and names every fault with line, column, what was found and what was
wanted. It needs no running dpserve. FILE may be - for stdin. Faults end it with exit code 2.`,
		Example: "  dpserve validate examples/quickstart/app.yaml --print",
		Args:    takes(1, "FILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			file, err := e.readApps(args[0])
			if err != nil {
				return err
			}
			if show {
				_, err = e.io.Out.Write(printApps(file.apps))
				return err
			}
			talk(e.io.Err, "%s is sound: %s", file.name, count(len(file.apps), "application"))
			return nil
		},
	}
	cmd.Flags().BoolVar(&show, "print", false, "print the file as dpserve reads it, sizes worked out, without what is at its default")
	return cmd
}
