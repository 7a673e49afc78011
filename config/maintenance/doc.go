// Package maintenance has the maintenance file: when changes may disturb nodes, and how many of a pool at once.
package maintenance
